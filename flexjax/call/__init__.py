"""The arguments of a call: checked, traced, and written as a plan with its operands."""
