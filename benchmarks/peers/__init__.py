"""Loaders side by side: one module each, with the same two functions.

``prepare(job)`` writes what the loader reads, once, and is absent where that is the loose files or the tar pack.
``batches(job)`` is one epoch, as :class:`peers.work.Delivered`; its workers are up to the loader.
"""
