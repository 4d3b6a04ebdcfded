"""A change stream made up on the spot, merged for real, and checked against a second opinion."""
