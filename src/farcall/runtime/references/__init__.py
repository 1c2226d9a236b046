"""References in a running agent: their handles and their values.

When a value may be dropped `protocol.refs` decides; nothing here does.
"""
