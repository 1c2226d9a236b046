"""The threads of an agent, which take events and run functions, and what they may leave behind.

Nothing here knows of calls, references or peers.
"""
