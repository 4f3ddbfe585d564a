"""Package of kvledger."""
