"""What ``liteattention-rocm doctor`` examines: does this installation compute what it should?

:mod:`.facts` says what is installed and which engine serves what; :mod:`.objects` loads the gfx942
code objects; :mod:`.cases` calls every family of kernels once; :mod:`.judge` compares the results
with float64 and with the bits that ``expected.json`` holds; :mod:`.report` puts it together.

``python -m liteattention_tools expected`` (in a checkout) makes ``expected.json`` again.
"""
