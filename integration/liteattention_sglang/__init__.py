"""SGLang plugins: :mod:`.srt` for language models, :mod:`.diffusion` for video and image models.

Each is an entry point of one of SGLang's own plugin groups; an installation of this package next
to SGLang is all it takes. Nothing is imported here: SGLang loads plugins in every process.
"""

#: What users write after ``--attention-backend``, in both runtimes.
BACKEND_NAME = "liteattention_rocm"
