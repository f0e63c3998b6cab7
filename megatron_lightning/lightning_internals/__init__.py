"""The only room with access to Lightning's private API: a public name here for each private name
there.

Checked with Lightning 2.6.6. Subclasses of Lightning's classes keep the private names of
methods called or overridden on themselves. ``tests/project/test_house.py`` lists these names, and
finds private names of Lightning in other files.
"""
