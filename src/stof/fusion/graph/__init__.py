"""The graph Dynamo captured: nodes, operators recognized in it, and schemes of segments."""
