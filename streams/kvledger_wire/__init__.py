"""The topic contract: records, keys, partitions, and the one accept function that every reader shares."""
