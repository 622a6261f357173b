"""Dead letters: messages that a handler could not handle, kept until somebody decides.

Here live the entry, the stores (memory, file, journal), the queue and its replays. The bus with
dead letters imports it; what is below the bus does not.
"""
