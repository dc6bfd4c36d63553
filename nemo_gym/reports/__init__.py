"""A rollouts file, or two of them, as one HTML page that needs nothing else; `report` is the way in.

The rollouts are read as a stream: a few numbers of each are kept (`facts`, `runs`), its texts go compressed into
blocks (`blocks`). From the numbers come plots (`figures`) and the comparison of two runs (`comparison`); `page` puts
everything into one file. What the browser does with it is in `static/`.
"""
