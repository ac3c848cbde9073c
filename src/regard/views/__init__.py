"""A before people's eyes. A view asks A through its public methods, and does no softmax itself.

| file | what it does |
|---|---|
| terminal, layout | heat maps, bars and tables in a terminal; text by display width |
| findings | what there is to say about a trace |
| figure, fonts | as a picture, with fonts that have the glyphs |
| page | as a page without scripts |
| words | what is said, in English and 中文 |
| order, cells, pools, sums, atlas | one head as a map: cells filled row by row, cut into tiles |
| server | the explorer, with its page in web |
| bundle | the explorer's scripts put together |
| standalone | a trace as one file that opens from disk |
| widget | A.show(), in a notebook |
"""
