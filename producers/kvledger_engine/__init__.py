"""A stand-in engine: plays recorded or generated events over real PUB and ROUTER sockets, with faults on request.

``standin.StandIn`` speaks as vLLM's publisher does, ``recording`` reads what real engines said, ``play`` paces one
against the other.
"""
