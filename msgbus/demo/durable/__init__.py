"""The second act: sales in a journal, a worker in another process, and kill -9."""
