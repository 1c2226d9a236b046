"""Membership of the group: how workers meet, find, reach, lose and leave each other.

Nothing here runs a function of a user.
"""
