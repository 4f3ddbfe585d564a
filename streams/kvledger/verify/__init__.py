"""Recordings through the whole pipeline, predicting before it looks: ``kvledger verify``.

    recording ──> stand-in engine ──ZMQ──> bridge ──Kafka──> fold ──> Redis ──> router ──> prediction
        └────────────────────────── the engine's own answer ───────────────────────────────> compare

``pipeline.py`` runs the real parts, ``check.py`` walks files, ``ask.py`` is the filter for machines, ``report.py``
counts and words, ``blind.py`` is what an index without groups would have said.
"""
