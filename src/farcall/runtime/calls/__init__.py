"""Calls out and calls in: requests, answers, deadlines, futures, and what may be called here.

A caller's thread writes its own request and, if it waits, reads its own answer. Nothing here dials,
asks the store or waits for a peer while it holds a lock.
"""
