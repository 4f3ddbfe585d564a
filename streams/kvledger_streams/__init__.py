"""The stream worker: folds ``kvledger.events`` into the index.

    app.py (Faust: group, fetch, agent) ──batch──> worker.py ──records──> fold.py ──steps──> the index (Redis)
                  ▲                                   │
                  └──────────── seek ─────────────────┴── progress.py: where to go on · broker.py: what the log holds

State lives in the index with the data; a worker that is killed anywhere is replaced by one that loads, seeks and reads.
"""
