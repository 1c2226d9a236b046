"""How connections come about: addresses, dialling, listening, handshakes, and the tables of links.

The same for native links and for those over sockets. Nothing here reads or writes a frame.
"""
