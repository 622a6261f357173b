"""`make soak`: an hour at half the highest rate, with a process killed each minute.

Messages go from one publishing process to three that share durable handlers of every mode.
Memory, file size, lag and latency have to stay flat, and nothing may be lost.
"""
