"""The ``kvledger`` command and the local stack: the composition root, which imports the other rooms lazily."""
