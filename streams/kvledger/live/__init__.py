"""A real vLLM on this machine's CPU, served while the pipeline follows it: ``make live``, and ``kvledger record``.

    workload ──> engine (a process of its own environment) ──ZMQ──> bridge ──Kafka──> fold ──> Redis ──> router
                    │ num_cached_tokens                  └───> tap: the trace, and how far the engine has published
                    └──────────────────────────> compare <────────────────────────────────── prediction

``environment.py`` makes the engine's virtual environment, ``families.py`` names tiny models, ``program.py`` is what
runs inside that environment (it imports nothing of ours), ``engine.py`` drives it, ``workload.py`` makes requests,
``tap.py`` reads the engine's sockets, ``trace.py`` writes recordings, ``session.py`` walks one family, ``server.py``
talks to an OpenAI-compatible vLLM server. vLLM is no dependency of ours, and CI runs none of it.
"""
