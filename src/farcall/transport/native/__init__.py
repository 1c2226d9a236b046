"""Frames over shared memory and sockets in C++, without the GIL. See docs/native.md."""
