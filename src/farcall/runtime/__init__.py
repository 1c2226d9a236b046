"""The agent: runs the protocol over a transport, and user functions on its threads."""
