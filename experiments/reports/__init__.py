"""The report of one run or several: read, grouped, with intervals, as a page, as files and in the terminal."""
