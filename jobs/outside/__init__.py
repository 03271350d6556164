"""What clients name and our processes connect to: addresses that may be, and webhooks."""
