"""Processes that farcall starts: what they print, how they end, and that none is left.

Nothing here knows of calls, references or workers' names in a group. Importing it imports no torch.
"""
