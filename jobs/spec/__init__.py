"""What users ask for: a job's description and its parts, each checked once."""
