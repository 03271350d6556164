"""What a job has answered by now: which part has a row, pages of rows, a row's tokens."""
