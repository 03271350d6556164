"""Batches of OpenAI's API: from an uploaded file to a job, and from the job's parts to output files."""
