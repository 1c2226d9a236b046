"""Freezes all objects of a fork server, which imports this last.

Else the collector of each fork looks through all of torch, and so copies it.
"""
import gc

gc.collect()
gc.freeze()
