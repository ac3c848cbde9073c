"""Lessons: one file each, words in two languages, every number computed when it is shown.

In each file compute functions return plain data, WORDS holds the sentences by language, and `show(console, language)`
puts the two together. This module names the lessons and imports none, so that a list of them costs nothing.
"""

#: in the order of the tour; each is a module here
PARTS = ("lookup", "learning", "scores", "matrix", "cache", "line", "grid", "sentence")
LANGUAGES = ("en", "zh")
