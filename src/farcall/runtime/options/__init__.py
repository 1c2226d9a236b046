"""What users may set, how it is checked, and what the environment sets.

Nothing here starts anything.
"""
