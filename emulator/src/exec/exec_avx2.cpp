#define VARIANT avx2
#include "exec/exec_impl.h"
