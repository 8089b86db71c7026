#define VARIANT avx2
#include "exec_impl.h"
