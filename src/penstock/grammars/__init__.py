"""Grammars in processes of their own: what they say to each other, the host, and the matchers.

llguidance recurses, allocates and computes as a grammar makes it, and an allocation that fails ends
its process. So no grammar of a client is ever parsed in the server or in a worker:

    server ──compile──▶ host ──fork──▶ matcher     one per grammar, limited in time and memory
    worker ──open─────▶ host                       one host per model: it has the vocabulary
    worker ◀──masks───────────────────▶ matcher

The host runs no client's grammar; a matcher that dies costs a replay. Imports llguidance, msgspec
and the standard library only: a host starts in a quarter of a second and a fork of it takes 2 MiB.
"""
