"""The command line ``liteattention-rocm``, and what the commands of all packages share.

:mod:`.root` puts it together; :mod:`.plan` and :mod:`.env` are commands; :mod:`.needs` says what is
missing, :mod:`.files` writes results safely, :mod:`.progress` shows what goes on, :mod:`.tables` is
for reports.
"""
