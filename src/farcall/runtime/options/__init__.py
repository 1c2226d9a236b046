"""The options that users may set, their checks, and the settings of the environment.

Nothing here starts anything.
"""
