"""The Redis contract: block keys, model facts, keyspace, values, functions, and the two ends that use them.

Writers (``writer.py``, called by the fold) and readers (``reader.py``, called by routers) meet only here.
``memory.py`` is the same index in one process; every implementation runs the suite in ``tests/contracts``.
"""
