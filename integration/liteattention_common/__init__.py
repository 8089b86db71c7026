"""What the integrations of several frameworks share; it knows none of them."""
