"""Lessons: one file each, words in two languages, every number computed when it is shown.

In each file compute functions return plain data, WORDS holds the sentences by language, TRY is a command or some lines of
Python that work as printed, and `show(page)` puts them together: it opens the page, says and shows, and closes with the
thing to try, a question with its answer, and where to go next. What a page is put on is the page's business (page.py), so
the same source serves other places. This module names the lessons and imports none: a list of them costs nothing.
"""

#: in the order of the tour; each is a module here
PARTS = (
    "lookup", "scores", "softmax", "matrix", "heads", "cache", "line", "grid", "learning", "sentence", "real", "errors",
    "quiz",
)  # fmt: skip
LANGUAGES = ("en", "zh")
