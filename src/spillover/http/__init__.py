"""What HTTP servers have in common: connections, tokens, bodies, signals.

Needs the extra ``serve``; whoever imports a module of this part asks for it first.
"""
