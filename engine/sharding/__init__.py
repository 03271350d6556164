"""A model split over several processes: which part of each weight is whose, and the sums and joins between them."""
