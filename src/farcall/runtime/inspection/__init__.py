"""What a worker tells of itself to somebody who asks: its calls, threads, links and limits.

Nothing here runs before somebody asks, and nothing of it is on the way of a call.
"""
