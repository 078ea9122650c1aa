"""What is known about a program's results before it runs, from the program alone or block by block.

The room owns interval analysis and the recognition of simple programs. It imports none of those that ask it.
"""
