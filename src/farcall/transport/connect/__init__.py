"""The making of connections: addresses, dialling, listening, handshakes, tables of links.

The same for native links and for those over sockets. Nothing here reads or writes a frame.
"""
