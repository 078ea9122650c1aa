"""What is known about a program's results before it runs, from the program alone or block by block.

The room owns interval analysis and the recognition of simple programs. Block masks, plans and backends ask it; it
imports none of them.
"""
