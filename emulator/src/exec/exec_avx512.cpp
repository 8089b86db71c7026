#define VARIANT avx512
#include "exec/exec_impl.h"
