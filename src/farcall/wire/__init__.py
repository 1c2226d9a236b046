"""The form of all that travels on a link: messages, and the frames around them.

Nothing in here knows a socket: a transport moves the parts of a frame, and asks here how long they
are and what they mean.
"""
