"""The plan: everything static about one attention call, in the form that backends read.

The room owns the plan, its operands, and what is derived from a plan before a backend is chosen.
"""
