#define VARIANT avx512
#include "exec_impl.h"
