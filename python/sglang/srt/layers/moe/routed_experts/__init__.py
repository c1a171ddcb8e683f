"""Routed experts: which experts each token of a request was routed to, returned at full speed.

The files, in the order in which a row travels: policy (may it be captured at all) and shape (how it
looks), capture, layout, kernels, store, collector, transport, reader, wire.
"""
