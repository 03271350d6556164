"""Who may ask, and how much: keys, limits, and pages of other sites."""
