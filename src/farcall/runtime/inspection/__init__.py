"""A worker's reports on itself to those that ask: its calls, threads, links and limits.

Nothing here runs before a question comes, and nothing of it is on the way of a call.
"""
