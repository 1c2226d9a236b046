"""Frames over TCP and Unix sockets in pure Python."""
